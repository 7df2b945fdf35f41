/* nodes-bench-tls: bulk over TLS 1.3 (OpenSSL) on one TCP connection. Both sides show a certificate
 * and check the other's. The cipher is that of Coxswain's direct connections. */
#include "stream.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <unistd.h>

struct channel {
    struct peer_options options;
    int fd;
    /* owned */
    SSL_CTX *context;
    SSL *tls;
};

static int tls_fail(const char *what)
{
    const char *why = ERR_reason_error_string(ERR_get_error());
    return peer_fail(what, why ? why : "connection closed");
}

static void channel_stop(void *peer)
{
    struct channel *channel = peer;
    SSL_free(channel->tls);
    SSL_CTX_free(channel->context);
    if (channel->fd >= 0)
        close(channel->fd);
    free(channel);
}

static int load_identity(struct channel *channel, bool lead)
{
    char ca[512], certificate[512], key[512];
    snprintf(ca, sizeof ca, "%s/ca.pem", channel->options.folder);
    peer_path(&channel->options, lead, ".pem", certificate, sizeof certificate);
    peer_path(&channel->options, lead, "-key.pem", key, sizeof key);
    channel->context = SSL_CTX_new(lead ? TLS_server_method() : TLS_client_method());
    if (!channel->context || !SSL_CTX_set_min_proto_version(channel->context, TLS1_3_VERSION) ||
        !SSL_CTX_set_ciphersuites(channel->context, "TLS_AES_128_GCM_SHA256") ||
        !SSL_CTX_load_verify_locations(channel->context, ca, NULL) ||
        !SSL_CTX_use_certificate_chain_file(channel->context, certificate) ||
        !SSL_CTX_use_PrivateKey_file(channel->context, key, SSL_FILETYPE_PEM))
        return tls_fail("certificates");
    SSL_CTX_set_verify(channel->context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    return 0;
}

static int handshake(struct channel *channel, bool lead)
{
    channel->tls = SSL_new(channel->context);
    if (!channel->tls || !SSL_set_fd(channel->tls, channel->fd))
        return tls_fail("a connection");
    if (!lead && !SSL_set1_host(channel->tls, "lead"))
        return tls_fail("the name of the lead");
    if ((lead ? SSL_accept(channel->tls) : SSL_connect(channel->tls)) != 1)
        return tls_fail("the handshake");
    return 0;
}

static int channel_open(const struct peer_options *options, bool lead, struct channel **ret_channel)
{
    struct channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return peer_fail_errno("a channel", ENOMEM);
    channel->options = *options;
    channel->fd = -1;
    int r = load_identity(channel, lead);
    if (r == 0 && lead)
        r = stream_accept(options, &channel->fd);
    else if (r == 0)
        r = (channel->fd = stream_connect(options)) < 0 ? channel->fd : 0;
    if (r == 0)
        r = handshake(channel, lead);
    if (r) {
        channel_stop(channel);
        return r;
    }
    *ret_channel = channel;
    return 0;
}

static int lead_start(const struct peer_options *options, void **ret_lead)
{
    struct channel *channel;
    if (options->node_count != 1)
        return peer_fail("bulk", "goes to one node");
    int r = channel_open(options, true, &channel);
    if (r == 0)
        *ret_lead = channel;
    return r;
}

static int lead_bulk(void *peer, const uint8_t *chunk)
{
    struct channel *channel = peer;
    const size_t all = channel->options.bulk_size;
    uint8_t acknowledged;
    for (size_t sent = 0, size; sent < all; sent += size) {
        const size_t rest = all - sent;
        if (SSL_write_ex(channel->tls, chunk,
                         rest < channel->options.chunk_size ? rest : channel->options.chunk_size,
                         &size) != 1)
            return tls_fail("sending");
    }
    return SSL_read(channel->tls, &acknowledged, 1) == 1 ? 0 : tls_fail("an acknowledgement");
}

static int node_main(const struct peer_options *options)
{
    struct channel *channel;
    int r = channel_open(options, false, &channel);
    if (r)
        return r;
    uint8_t *chunk = malloc(options->chunk_size);
    for (size_t received = 0, size; chunk;) {
        const size_t rest = options->bulk_size - received;
        if (SSL_read_ex(channel->tls, chunk,
                        rest < options->chunk_size ? rest : options->chunk_size, &size) != 1)
            break;
        received += size;
        if (received < options->bulk_size)
            continue;
        received = 0;
        if (SSL_write(channel->tls, chunk, 1) != 1)
            break;
    }
    free(chunk);
    channel_stop(channel);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct peer_ops ops = {.transport = "tls",
                                        .start = lead_start,
                                        .bulk = lead_bulk,
                                        .stop = channel_stop,
                                        .node = node_main};
    return peer_main(argc, argv, &ops);
}
