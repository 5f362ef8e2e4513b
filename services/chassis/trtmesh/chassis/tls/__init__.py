"""TLS of a process: its settings, its certificates, and connections whose handshake comes first."""
