"""Limits the router's load: permits for items, a queue per model, and an account per caller."""

from trtmesh.router.admission.permits import Admission, AdmissionLimits, Permit
from trtmesh.router.admission.rate_limit import Account, Bucket, RateLimiter

__all__ = [
    "Account",
    "Admission",
    "AdmissionLimits",
    "Bucket",
    "Permit",
    "RateLimiter",
]
