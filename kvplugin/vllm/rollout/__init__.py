"""Arms in a running engine: assignment in the front end, salts in the engine core, policies in the workers."""
