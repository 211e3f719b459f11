"""Diagnosis of an installation: ``examination`` collects facts, all other modules judge them and need no broker."""
