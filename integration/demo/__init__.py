"""The demo: a small trained model, one server, and the same questions under five policies."""
