"""The comparison of split models with whole ones."""
