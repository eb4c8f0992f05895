"""A capture's report for people: a terminal table, and one HTML file."""
