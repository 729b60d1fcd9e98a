"""Plans beside published and own measurements and other estimators, and loops beside others."""
