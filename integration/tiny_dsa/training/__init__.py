"""The trained tiny model: its tasks, its recipe, and the forms in which it is written."""
