"""Charts and pieces of pages: little code of our own, which loads nothing."""
