from tests.isolation.homes import home

__all__ = ["home"]
