"""Pages of the site that follow from the source and from data; ``python -m tests.site`` writes them anew."""
