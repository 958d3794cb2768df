"""The report of a plan: one page with charts, made with plotly."""
