"""The commands. The only room that prints or exits: results go to stdout, talk goes to stderr."""
