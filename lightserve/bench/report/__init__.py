"""The HTML report of ``lightserve bench serve``: one file, plots as inline SVG, no script, no network."""
