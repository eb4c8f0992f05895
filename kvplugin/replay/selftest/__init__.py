"""Made-up captures of an honest engine, the faults put into them, and the run that asks for their names."""
