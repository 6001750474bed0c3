"""One process of a run: what looks on while a script trains, and where the run stands."""
