"""Diagnosis of an installation: ``examination`` collects facts, the other modules judge them without a broker."""
