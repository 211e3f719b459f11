"""Diagnosis of a namespace: ``examination`` collects facts, the other modules judge them without a broker."""
