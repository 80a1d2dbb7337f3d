"""Tables from the records of finished runs. Nothing here needs torch."""
