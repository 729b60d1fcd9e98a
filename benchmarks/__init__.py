"""Proofs and comparisons: plans beside published and own measurements, other estimators, other loops."""
