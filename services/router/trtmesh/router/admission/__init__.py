"""Limits the router's load: permits for items, a queue per model, and token rates of API keys."""

from trtmesh.router.admission.permits import Admission, AdmissionLimits, Permit
from trtmesh.router.admission.rate_limit import Bucket, RateLimit, RateLimiter, key_name

__all__ = [
    "Admission",
    "AdmissionLimits",
    "Bucket",
    "Permit",
    "RateLimit",
    "RateLimiter",
    "key_name",
]
