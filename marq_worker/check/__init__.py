"""Diagnosis of a namespace: ``examination`` collects facts, and the other modules evaluate them without a broker."""
