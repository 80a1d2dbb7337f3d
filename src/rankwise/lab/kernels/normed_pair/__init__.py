"""A low-rank pair applied to rows that a layer norm comes before; `reference.py` defines it."""
