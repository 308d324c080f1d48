"""The `turnout` command: one thin file per subcommand."""
