"""Speed of codecs, as a share of what copying memory reaches in the same run."""
