"""Programs that print tables. They measure or compare, and assert nothing."""
