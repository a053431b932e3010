"""eval judges: finished clips and traces in, numbers out, whoever made them. It knows no backbone and no memory."""
