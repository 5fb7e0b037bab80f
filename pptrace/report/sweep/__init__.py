"""Output of a sweep: columns, a table, figures."""
