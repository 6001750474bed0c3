"""Whether a script computes on many devices what it computes on one: two runs of it, compared tensor by tensor."""
