"""The command line: `pdserve COMMAND …`."""
