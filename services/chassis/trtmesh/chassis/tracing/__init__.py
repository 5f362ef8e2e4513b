"""Traces: `spans.py` has spans as records, `tracer.py` opens what exports them, `otlp.py` is the only user of the
OpenTelemetry SDK."""
