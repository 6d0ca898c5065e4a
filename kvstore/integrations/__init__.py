"""Integrations with engines. Each imports its engine; nothing else in kvstore does."""
