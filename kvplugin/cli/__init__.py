"""The ``kvplugin`` command: one file per subcommand."""
