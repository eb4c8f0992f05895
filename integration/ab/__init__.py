"""Two arms under load: traffic, a script of changes, and an independent count of what must come out."""
