"""The command line ``decent-dp``: parse, call the library, print.

`decent_dp.cli.main` has the table of commands, `decent_dp.cli.parsing` and `decent_dp.cli.output` what they share.
Nobody imports this package, and nothing in it imports torch before a command needs it.
"""
