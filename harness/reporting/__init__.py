"""Reports: one record per family as JSON, and the Markdown and HTML made from it. Imports no MLX."""

from __future__ import annotations

from harness.reporting.environment import versions
from harness.reporting.files import check_writable, read_text, replace, write_atomically
from harness.reporting.html import html_page
from harness.reporting.markdown import family_markdown, summary_table
from harness.reporting.pages import write_pages
from harness.reporting.pictures import pictures
from harness.reporting.record import family_record, load_schema, record_text

__all__ = [
    "check_writable",
    "family_markdown",
    "family_record",
    "html_page",
    "load_schema",
    "pictures",
    "read_text",
    "record_text",
    "replace",
    "summary_table",
    "versions",
    "write_atomically",
    "write_pages",
]
