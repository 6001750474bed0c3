"""The step of an optimizer, unit by unit, beside what follows it."""
