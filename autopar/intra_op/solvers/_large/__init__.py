"""The search for problems that stay large after reductions: priced memory, then random moves."""
