/* nodes-bench-grpc: a bidirectional stream of the synchronous C++ API per node, mTLS on both sides.
 * Nodes connect. The lead writes to every stream, then reads every stream, on its main thread; a
 * node replies on its own. gRPC has an API for C++ alone, hence this file. */
#include "peer.h"

#include <cerrno>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "step.grpc.pb.h"

namespace
{

constexpr int RETRY_MS = 20;

using Frames = grpc::ServerReaderWriter<bench::Frame, bench::Frame>;

std::string read_file(const std::string &path)
{
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

std::string ca(const peer_options &options)
{
    return read_file(std::string(options.folder) + "/ca.pem");
}

std::string own(const peer_options &options, bool lead, const char *end)
{
    char path[512];
    peer_path(&options, lead, end, path, sizeof path);
    return read_file(path);
}

std::string endpoint(const peer_options &options)
{
    return std::string(options.lead) + ":" + std::to_string(PEER_PORT);
}

/* ---- the lead ---- */

class Lead final : public bench::Node::Service
{
  public:
    explicit Lead(const peer_options &options) : options_(options)
    {
    }

    int start()
    {
        grpc::SslServerCredentialsOptions identity(
            GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
        identity.pem_root_certs = ca(options_);
        identity.pem_key_cert_pairs.push_back(
            {own(options_, true, "-key.pem"), own(options_, true, ".pem")});
        grpc::ServerBuilder builder;
        builder.AddListeningPort(endpoint(options_), grpc::SslServerCredentials(identity));
        builder.RegisterService(this);
        server_ = builder.BuildAndStart();
        if (!server_)
            return peer_fail(options_.lead, "cannot listen");
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return streams_.size() == options_.node_count; });
        return 0;
    }

    int step(const uint8_t *request, peer_replies *replies)
    {
        request_.set_payload(request, options_.request_size);
        for (Frames *stream : streams_)
            if (!stream->Write(request_))
                return -EPIPE;
        for (Frames *stream : streams_) {
            if (!stream->Read(&reply_))
                return -EPIPE;
            const std::string &payload = reply_.payload();
            int r = peer_replies_take(replies, payload.data(), payload.size());
            if (r)
                return r;
        }
        return 0;
    }

    void stop()
    {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopped_ = true;
        }
        changed_.notify_all();
        server_->Shutdown();
    }

    /* On a thread of the stream's own: lends the stream to the main thread. */
    grpc::Status Steps(grpc::ServerContext *, Frames *stream) override
    {
        std::unique_lock<std::mutex> lock(mutex_);
        streams_.push_back(stream);
        changed_.notify_all();
        changed_.wait(lock, [this] { return stopped_; });
        return grpc::Status::OK;
    }

  private:
    const peer_options options_;
    std::unique_ptr<grpc::Server> server_;
    bench::Frame request_, reply_;
    std::mutex mutex_;
    std::condition_variable changed_;
    /* The main thread's own once all are there. */
    std::vector<Frames *> streams_;
    bool stopped_ = false;
};

int lead_start(const peer_options *options, void **ret_lead)
{
    auto lead = std::make_unique<Lead>(*options);
    int r = lead->start();
    if (r == 0)
        *ret_lead = lead.release();
    return r;
}

int lead_step(void *lead, const uint8_t *request, peer_replies *replies)
{
    return static_cast<Lead *>(lead)->step(request, replies);
}

void lead_stop(void *peer)
{
    std::unique_ptr<Lead> lead(static_cast<Lead *>(peer));
    lead->stop();
}

/* ---- a node ---- */

std::shared_ptr<grpc::Channel> open_channel(const peer_options &options)
{
    grpc::SslCredentialsOptions identity;
    grpc::ChannelArguments arguments;
    identity.pem_root_certs = ca(options);
    identity.pem_cert_chain = own(options, false, ".pem");
    identity.pem_private_key = own(options, false, "-key.pem");
    arguments.SetSslTargetNameOverride("lead");
    /* The lead starts beside the node. */
    for (const char *backoff :
         {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, GRPC_ARG_MIN_RECONNECT_BACKOFF_MS,
          GRPC_ARG_MAX_RECONNECT_BACKOFF_MS})
        arguments.SetInt(backoff, RETRY_MS);
    return grpc::CreateCustomChannel(endpoint(options), grpc::SslCredentials(identity), arguments);
}

int node_main(const peer_options *options)
{
    auto stub = bench::Node::NewStub(open_channel(*options));
    grpc::ClientContext context;
    bench::Frame request, reply;
    context.set_wait_for_ready(true);
    auto stream = stub->Steps(&context);
    std::string &payload = *reply.mutable_payload();
    payload.resize(options->reply_size);
    while (stream->Read(&request)) {
        const std::string &asked = request.payload();
        if (!peer_reply(options, asked.data(), asked.size(),
                        reinterpret_cast<uint8_t *>(payload.data())))
            return peer_fail("a request", "malformed");
        if (!stream->Write(reply))
            break;
    }
    stream->WritesDone();
    grpc::Status status = stream->Finish();
    return status.ok() ? 0 : peer_fail("the stream", status.error_message().c_str());
}

} // namespace

int main(int argc, char **argv)
{
    peer_ops ops = {};
    ops.transport = "grpc";
    ops.start = lead_start;
    ops.step = lead_step;
    ops.stop = lead_stop;
    ops.node = node_main;
    return peer_main(argc, argv, &ops);
}
