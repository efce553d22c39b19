"""Tests. Helpers shared by several files are imported as `from tests.NAME import …`."""
