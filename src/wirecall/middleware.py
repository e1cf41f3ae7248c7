"""Middleware that every app can use."""

from wirecall.ratelimit import RateLimit as RateLimit

__all__ = ["RateLimit"]
