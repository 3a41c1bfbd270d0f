"""Programs as users of other libraries write them, compared with what the plain library gives."""
