"""One module per framework: from native fields to an ``EffectiveConfig``."""
