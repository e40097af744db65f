"""Two ends that know one secret accept each other's proof, and nobody else's."""

from mtrain.system.mutual_authentication import End, named_nonce

SECRET = b"open sesame"


def pair(first: bytes = SECRET, second: bytes = SECRET) -> tuple[End, End]:
    return End(first, "joins", named_nonce("7")), End(second, "leads")


def test_ends_with_one_secret_accept_each_other_and_share_a_key():
    joins, leads = pair()
    assert leads.accepts(joins.nonce, joins.proof(leads.nonce))
    assert joins.accepts(leads.nonce, leads.proof(joins.nonce))
    assert joins.session_key(leads.nonce) == leads.session_key(joins.nonce)


def test_another_secret_gives_no_proof_and_another_key():
    joins, leads = pair(second=b"another")
    assert not leads.accepts(joins.nonce, joins.proof(leads.nonce))
    assert joins.session_key(leads.nonce) != leads.session_key(joins.nonce)


def test_a_proof_is_good_for_one_role_one_name_and_one_connection():
    joins, leads = pair()
    proof = joins.proof(leads.nonce)
    assert not joins.accepts(joins.nonce, proof), "its sender does not take it back as the other end's"
    assert not leads.accepts(joins.nonce.replace("7:", "8:"), proof), "the name is covered"
    assert not End(SECRET, "leads").accepts(joins.nonce, proof), "the next connection has another nonce"
    assert not leads.accepts(joins.nonce, "\udcff"), "what is no text is no proof"
