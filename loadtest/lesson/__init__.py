"""`tandem lesson`: five pictures of serial decoding, measured on a running lab and drawn in one page."""
