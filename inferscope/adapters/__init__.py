"""Adapters: foreign engines, observed without a change to their source; one file per engine."""
