"""Inner loops that deserve an implementation of their own: a plain reference, and fast twins with its signature."""
