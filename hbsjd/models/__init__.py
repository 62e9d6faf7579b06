from hbsjd.models import vq as vq  # so that hbsjd.models.vq.load(...) needs no import of its own
