"""What runs came to: tables for the terminal and Markdown, and a page with figures (`rankwise.lab.report.page`)."""

from rankwise.lab.report.tables import (
    CONTROL,
    FORMATS,
    MEASURES,
    RECORD,
    TABLE,
    TAUGHT,
    Table,
    control_of,
    gather,
    row_table,
    spread,
    table,
)

__all__ = [
    "CONTROL",
    "FORMATS",
    "MEASURES",
    "RECORD",
    "TABLE",
    "TAUGHT",
    "Table",
    "control_of",
    "gather",
    "row_table",
    "spread",
    "table",
]
