"""Parity with public references: a folder of numbers is one case, and `table.CHECKS` says how each kind of case is checked."""
