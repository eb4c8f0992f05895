"""The rows of the dashboard, one file each."""
