from tests.isolation.homes import home, user

__all__ = ["home", "user"]
