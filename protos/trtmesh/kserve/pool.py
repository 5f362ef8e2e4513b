"""The descriptor pool of these messages.

Triton's client registers messages with the same names in the default pool, which takes each name once. With a pool of
their own, both exist in one process, whatever the client's release.
"""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
