"""What runs came to: tables for the terminal and Markdown, and a page with figures (`rankwise.lab.report.page`)."""

from rankwise.lab.report.tables import (
    CONTROL,
    EXPERIMENT,
    EXPORT,
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
    "EXPERIMENT",
    "EXPORT",
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
