"""What happens to a compact model: it is saved and loaded."""
